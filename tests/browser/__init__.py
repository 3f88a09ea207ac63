"""What people look at, looked at in headless Chromium; screenshots are kept under build/screenshots/."""
