"""Faults between hosts: Penstock's images as containers on two networks, judged by the fault kit."""
