"""``python -m tensorferry`` runs the command line."""

from tensorferry.cli import main

main()
