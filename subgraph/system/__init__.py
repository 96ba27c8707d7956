"""What system and machine give: files to trust, forks, memory pages, processors."""
