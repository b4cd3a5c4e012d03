"""Stages of pipelines: how blocks are divided among them, and what they send each other."""
