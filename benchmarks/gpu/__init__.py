"""What the verifier does on a GPU: `python -m benchmarks.gpu`."""
