"""python -m ssmax_lab: the command line, as under torchrun."""

from ssmax_lab.cli import main

main()
