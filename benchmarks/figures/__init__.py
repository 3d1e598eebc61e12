"""Pages of figures under benchmarks/, written from the records alone."""
