"""Adapters to serving stacks: they translate only. Nothing of kvjax imports them."""
