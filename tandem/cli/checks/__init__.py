"""What `tandem doctor` looks at, on this machine and at a gateway."""
