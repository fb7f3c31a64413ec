""""""

from sosampler.cli.main import main

main()
