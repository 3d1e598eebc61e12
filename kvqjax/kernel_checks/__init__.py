"""Whether a kernel may run on this very chip: bodies to try it on, the comparison, and where its verdict is kept."""
