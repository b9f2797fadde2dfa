"""The dashboard: the model of a job, the page that draws it, and files for Prometheus and Grafana."""
