"""How attention reads an encoded body: a file for each reader. kvqjax/cache/layout.py chooses
one."""
