"""Room 8, for people: pictures and exports of clusters."""
