"""Explanation: which phases, events and errors make up a step, predicted and measured."""
