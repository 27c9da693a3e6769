"""Action plugins; ansible.cfg names this folder."""
