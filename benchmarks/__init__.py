"""Benchmarks. Each prints a table and writes JSON; figures are ratios within one run."""
