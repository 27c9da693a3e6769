"""Thin Ansible plugins: they hand over to the package, and decide nothing."""
