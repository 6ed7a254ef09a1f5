"""python -m ssmax: the command line, as under torchrun."""

from ssmax.cli import main

main()
