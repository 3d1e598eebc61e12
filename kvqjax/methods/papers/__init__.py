"""Published methods, a file a paper, or a few that share their layers. `kvqjax.methods` has their
names."""
