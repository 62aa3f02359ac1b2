"""`python -m fsl_sage`."""

from fsl_sage.cli import main

main()
