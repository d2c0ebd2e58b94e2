"""Load on a server and what it took: `tandem bench`, and benchmarks that need the same.

Prompts, endpoints, arrivals, latencies. Knows no command line and prints nothing.
"""
