"""What people start and talk to: gateway, controller, client, command line, configuration."""
