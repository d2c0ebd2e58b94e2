"""Tandem beside other systems on one machine: same model, dtype, threads, prompts, by turns."""
