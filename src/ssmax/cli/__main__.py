"""python -m ssmax.cli."""

from ssmax.cli import main

main()
