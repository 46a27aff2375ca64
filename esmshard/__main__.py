"""`python -m esmshard` is the command `esmshard`."""

from esmshard.cli import main

main()
