"""What any study over lossytp's records uses.

`grid` reads an experiment's cells from YAML, `run` runs notebooks, and `parameters` checks their parameters; `torchrun`
trains on several processes. `tables` turns records into tables, with one row per run, and compares arms by seed.
`statistics` has intervals and the loss budget, and `style` the look of figures.
"""
