# The light install, as `pip install .` gives it: choosing frames, no torch.
#   docker build -t sosampler .
#   docker run --rm -v "$PWD:/videos" sosampler select match.mp4 -n 8 --json
FROM python:3.12-slim
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install . && useradd --uid 1000 --create-home sosampler
# Strangers' videos are decoded in here: not as root.
USER 1000
WORKDIR /videos
ENTRYPOINT ["sosampler"]
CMD ["--help"]
