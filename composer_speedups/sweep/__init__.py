"""Several training runs from one command: ``tune`` tries sets of techniques, ``repeat`` trains several seeds."""
