"""`python -m esmshard` is the command `esmshard`."""

from esmshard.cli.app import main

main()
