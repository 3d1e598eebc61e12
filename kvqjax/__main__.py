"""`python -m kvqjax`."""

from kvqjax.cli import main

main()
