"""OD-MoE (arXiv 2512.03927): main node, shadow, and workers that load on demand.

What its processes say to each other:

main -> shadow    begin   a prompt is about to run
                  token   a decode step begins; tokens, keys and values to align
shadow -> main    predicted  what layers of a step will choose, from count `first` on
shadow -> workers load       their shares of them
main -> workers   passed     layers are over, and have not asked this worker
shadow -> main    said       all that it had to say has been said before
"""
