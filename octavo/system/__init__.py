"""The machine: its clock, devices and threads, and the processes that share its memory."""
