"""Engine processes: started, watched, replaced, chosen for a request, on one machine or several."""
