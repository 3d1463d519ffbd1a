"""OD-MoE (arXiv 2512.03927): main node, shadow, and workers that load on demand.

What its processes say to each other:

main -> shadow    begin   a prompt is about to run
                  token   a decode step begins; tokens, keys and values to align
shadow -> main    predicted  what a layer of a step will choose
shadow -> workers load       their share of it
main -> workers   passed     layers are over, and have not asked this worker
shadow -> main    said       all that it had to say has been said before
"""
