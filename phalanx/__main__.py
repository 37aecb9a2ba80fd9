"""`python -m phalanx`, and so `torchrun -m phalanx`."""

from phalanx.cli.main import main

main()
