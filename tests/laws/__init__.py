"""Laws that members must obey, a file for each kind of member."""
