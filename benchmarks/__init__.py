"""Benchmarks against other job queues, and of scaling: `make bench`, `make bench-scaling`."""
