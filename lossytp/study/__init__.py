"""Many runs: grids of cells, records as tables, statistics, figures. Knows nothing of how a run is trained."""
