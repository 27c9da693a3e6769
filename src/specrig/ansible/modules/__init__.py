"""Modules; ansible.cfg names this folder."""
