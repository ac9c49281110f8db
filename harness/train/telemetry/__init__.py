"""What devices and nodes do while a run trains: a process of its own on each node looks.

gpus.py and node.py read, window.py adds up, sampler.py is the process, watch.py is the side of it
that training sees. Nothing of it is called inside a step.
"""
