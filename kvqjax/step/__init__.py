"""One step of a model over a cache: a layer, all layers, an exact prompt; saving what came of
it."""
