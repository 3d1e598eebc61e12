"""Many users at equal memory, through our engine and others."""
