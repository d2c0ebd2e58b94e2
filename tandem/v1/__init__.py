"""The wire contract, generated from `protos/tandem/v1`: see the .proto files for what it means."""
