"""What serving through the services costs beside the engine: `python -m benchmarks.serving`."""
