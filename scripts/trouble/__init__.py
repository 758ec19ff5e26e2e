"""Step time, residuals and accuracy with slow ranks and lost packets; see docs/trouble.md.

`runs` has the jobs, `rank` runs on each rank, `report` writes the page.
"""
