"""Levers, predicted and measured."""
