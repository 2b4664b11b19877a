"""Data sets, images and what feeds them to training and evaluation; import the module that owns what you need.

Sizes are (height, width); boxes are ``xyxy`` in pixels until ``loaders.collate`` turns them into ``Targets``.
"""
