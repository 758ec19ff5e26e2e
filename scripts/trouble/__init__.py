"""Slow ranks and lost packets: what they do to step time, residuals and accuracy; docs/trouble.md.

`runs` has what is measured, `rank` measures it on a rank, `report` writes the page.
"""
