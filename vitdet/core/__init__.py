"""The Transformer. Imports torch and nothing of ours.

Shapes stand in trailing comments on the line that changes them, by this legend, used in the whole package:
B batch, N tokens, M memory tokens, Q queries, T targets, H heads, D head width, C channels, L layers, S feature levels,
P sampling points, K classes, (h, w) map size. Tokens are row-major: index = y * w + x. Sizes are (height, width).
"""
