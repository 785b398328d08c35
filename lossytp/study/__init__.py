"""Turn many runs into the paper's numbers and figures. `lossytp.training` trains them.

1. Run: `grid` reads an experiment's cells; `run_notebook` and `torchrun` run them; `parameters` checks a notebook's;
   `measurements` measures what records lack.
2. Records to tables: `records` has one row per run; `run_measures` adds what each run lost and sent.
3. Statistics: `statistics` has intervals and the loss budget; `comparisons` pairs an experiment's arms by seed.
4. Answers: `analysis` has one module for each question of the paper.
5. Figures: `figures` draws tables, and the losses of a recorded network.
6. Paper: `paper` and the modules `paper_...` have a function for each section, and `claims` the condition of
   each claim; `typeset` compiles the numbers that notebooks/50_figures.ipynb writes.
"""
