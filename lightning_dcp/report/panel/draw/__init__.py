"""Drawings of the panel's parts as SVG; colours and patterns are those of the page's style sheet."""
