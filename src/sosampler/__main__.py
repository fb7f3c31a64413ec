"""`python -m sosampler`."""

from sosampler.cli.main import main

main()
