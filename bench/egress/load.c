/* The clients of bench.egress: one thread, one epoll, any number of clients of a forward proxy.
 *
 *   load -m exchange  ask and read answers; with -k on kept connections, else one connection for each operation.
 *                     With -w each client's connection is opened and used once first, few at a time; then it says READY,
 *                     waits for a line of input, and counts from there
 *   load -m hold      open tunnels, say READY, keep them for -d seconds
 *   load -m deaf      ask for -p, say READY, and read nothing of the answers for -d seconds
 *   load -m flood     open tunnels, send a ClientHello and then zeros without end, for -d seconds
 *
 * -x address:port   a proxy's door; more than one: client i goes through door i modulo their number
 * -a address:port   no proxy: connect there
 * -o host:port      the origin that is asked for
 * -p path  -c clients  -n operations at most  -d seconds at most  -k keep  -w warm up  -t tunnel (CONNECT)  -s TLS inside
 *
 * Prints READY with the number of clients in place (hold, deaf, flood), and at the end one JSON object:
 * ops, errors, seconds, bytes (of bodies), p50_us, p99_us, max_us, status (the last one), issuer (of the certificate seen).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define HEAD_BYTES 8192
#define MOST_DOORS 4096
#define MOST_FAILURES 1000
#define WARMING 32 /* clients that open their connections at a time */

enum mode { EXCHANGE, HOLD, DEAF, FLOOD };
enum phase { OFF, ASK_TUNNEL, TUNNEL_ANSWER, HANDSHAKE, ASK, ANSWER, BODY, RESTING, FLOODING, PARKED };

struct client {
    int fd;
    enum phase phase;
    bool used; /* the connection has carried an answer before */
    SSL *tls;
    const char *out;
    size_t out_left;
    char head[HEAD_BYTES];
    size_t head_len;
    long long body_left;
    double began;
    struct sockaddr_in to;
};

static enum mode mode = EXCHANGE;
static bool keep, tunnel, secure, warming;
static const char *origin = "", *path = "/";
static char host[256], ask_tunnel[1024], ask[2048], issuer[256];
static struct sockaddr_in doors[MOST_DOORS];
static size_t door_count;
static double deadline;
static unsigned long long ops, errors, started, most_ops = ~0ull, bytes;
static int last_status, resting, parked, dialled, clients = 1, epoll_fd, live;
static struct client *all;
static float *samples;
static size_t sample_count, sample_room;
static SSL_CTX *context;
static char bulk[1 << 18];

static double seconds(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static void die(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(2);
}

static void hang_up(struct client *c) {
    if (c->phase == OFF) return;
    if (c->phase == RESTING || c->phase == FLOODING) resting--;
    if (c->tls) {
        if (c->phase == BODY) SSL_shutdown(c->tls); /* the answer is whole: close_notify, as a polite client does */
        SSL_free(c->tls);
    }
    c->tls = NULL;
    close(c->fd);
    c->phase = OFF;
    live--;
}

static void say(struct client *c, enum phase phase, const char *what) {
    c->phase = phase;
    c->out = what;
    c->out_left = strlen(what);
    c->head_len = 0;
}

/* Begin the next operation of this client on a new connection, if there is to be one. */
static void dial(struct client *c) {
    if (started >= most_ops || seconds() >= deadline || errors >= MOST_FAILURES) return;
    started++;
    c->began = seconds();
    c->used = false;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket");
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(c->fd, (struct sockaddr *)&c->to, sizeof c->to) < 0 && errno != EINPROGRESS) die("connect");
    /* Edge-triggered: every step below goes on until the kernel says EAGAIN, so interest never changes. */
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event) < 0) die("epoll_ctl");
    live++;
    if (tunnel) say(c, ASK_TUNNEL, ask_tunnel);
    else if (secure) c->phase = HANDSHAKE;
    else say(c, ASK, ask);
}

static void failed(struct client *c, const char *why) {
    if (errors++ < 3) fprintf(stderr, "load: %s in phase %d: %s; %.*s\n", why, c->phase, strerror(errno), (int)c->head_len, c->head);
    hang_up(c);
    if (mode == EXCHANGE) dial(c);
}

/* Both return a count, 0 for the end (read) and -1 with errno; EAGAIN also for what TLS waits for. */
static ssize_t tls_result(SSL *tls, int result) {
    if (result > 0) return result;
    switch (SSL_get_error(tls, result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE: errno = EAGAIN; return -1;
    case SSL_ERROR_ZERO_RETURN: return 0;
    default: errno = errno ? errno : EPROTO; return -1;
    }
}

static ssize_t read_some(struct client *c, void *to, size_t room) {
    if (!c->tls) return recv(c->fd, to, room, 0);
    errno = 0;
    ERR_clear_error();
    return tls_result(c->tls, SSL_read(c->tls, to, (int)room));
}

static ssize_t write_some(struct client *c, const void *from, size_t count) {
    if (!c->tls) return send(c->fd, from, count, MSG_NOSIGNAL);
    errno = 0;
    ERR_clear_error();
    return tls_result(c->tls, SSL_write(c->tls, from, (int)count));
}

/* True when all is sent; false when it waits or has failed. */
static bool send_out(struct client *c) {
    while (c->out_left > 0) {
        ssize_t sent = write_some(c, c->out, c->out_left);
        if (sent <= 0) {
            if (errno != EAGAIN) failed(c, "send");
            return false;
        }
        c->out += sent;
        c->out_left -= (size_t)sent;
    }
    return true;
}

/* The length of the head once it is whole, else 0; then the client waits or has failed. */
static size_t read_head(struct client *c) {
    for (;;) {
        char *end = memmem(c->head, c->head_len, "\r\n\r\n", 4);
        if (end) return (size_t)(end - c->head) + 4;
        if (c->head_len == sizeof c->head - 1) {
            failed(c, "head too long");
            return 0;
        }
        ssize_t got = read_some(c, c->head + c->head_len, sizeof c->head - 1 - c->head_len);
        if (got < 0 && errno == EAGAIN) return 0;
        if (got <= 0) {
            failed(c, got ? "read" : "closed before the answer");
            return 0;
        }
        c->head_len += (size_t)got;
        c->head[c->head_len] = 0;
    }
}

static long long content_length(const char *head) {
    const char *at = strcasestr(head, "\r\ncontent-length:");
    return at ? atoll(at + 17) : 0;
}

static void rest(struct client *c) {
    c->phase = mode == FLOOD ? FLOODING : RESTING;
    resting++;
}

/* One client has used its connection once: it waits, and the next one may come. */
static void park(struct client *c) {
    c->phase = PARKED;
    parked++;
    if (dialled < clients) dial(&all[dialled++]);
}

static void complete(struct client *c) {
    if (warming) {
        park(c);
        return;
    }
    if (sample_count == sample_room) {
        sample_room = sample_room ? sample_room * 2 : 1 << 16;
        samples = realloc(samples, sample_room * sizeof *samples);
        if (!samples) die("realloc");
    }
    samples[sample_count++] = (float)((seconds() - c->began) * 1e6);
    ops++;
    if (!keep) {
        hang_up(c);
        dial(c);
    } else if (started >= most_ops || seconds() >= deadline) {
        hang_up(c);
    } else {
        started++;
        c->used = true;
        c->began = seconds();
        say(c, ASK, ask);
    }
}

static bool handshake(struct client *c) {
    if (!c->tls) {
        c->tls = SSL_new(context);
        if (!c->tls || !SSL_set_fd(c->tls, c->fd) || !SSL_set_tlsext_host_name(c->tls, host)) die("TLS");
        SSL_set_connect_state(c->tls);
    }
    errno = 0;
    ERR_clear_error();
    int result = SSL_do_handshake(c->tls);
    if (result != 1) {
        tls_result(c->tls, result);
        if (errno != EAGAIN) failed(c, "handshake");
        else if (mode == FLOOD) rest(c); /* the ClientHello is out; nobody answers it */
        return mode == FLOOD && c->phase == FLOODING;
    }
    if (!issuer[0]) {
        X509 *seen = SSL_get1_peer_certificate(c->tls);
        if (seen) X509_NAME_oneline(X509_get_issuer_name(seen), issuer, sizeof issuer - 1);
        X509_free(seen);
    }
    return true;
}

static bool answered_tunnel(struct client *c) {
    if (!read_head(c)) return false;
    last_status = atoi(c->head + 9);
    if (last_status == 200) return true;
    failed(c, "no tunnel");
    return false;
}

static bool answered(struct client *c) {
    size_t end = read_head(c);
    if (!end) return false;
    last_status = atoi(c->head + 9);
    if (last_status != 200) {
        failed(c, "not 200");
        return false;
    }
    c->head[end - 1] = 0;
    size_t early = c->head_len - end;
    bytes += early;
    c->body_left = content_length(c->head) - (long long)early;
    c->phase = BODY;
    return true;
}

static bool read_body(struct client *c) {
    while (c->body_left > 0) {
        size_t room = c->body_left < (long long)sizeof bulk ? (size_t)c->body_left : sizeof bulk;
        ssize_t got = read_some(c, bulk, room);
        if (got < 0 && errno == EAGAIN) return false;
        if (got <= 0) {
            failed(c, "body cut short");
            return false;
        }
        c->body_left -= got;
        bytes += (unsigned long long)got;
    }
    return true;
}

/* Go on with one client until it waits. */
static void advance(struct client *c) {
    for (;;) switch (c->phase) {
        case OFF: return;
        case ASK_TUNNEL:
            if (!send_out(c)) return;
            c->phase = TUNNEL_ANSWER;
            break;
        case TUNNEL_ANSWER:
            if (!answered_tunnel(c)) return;
            if (secure) c->phase = HANDSHAKE;
            else say(c, ASK, ask);
            break;
        case HANDSHAKE:
            if (!handshake(c)) return;
            if (c->phase == FLOODING) break;
            if (mode == HOLD) rest(c);
            else say(c, ASK, ask);
            break;
        case ASK:
            if (!send_out(c)) return;
            if (mode == DEAF) rest(c);
            else c->phase = ANSWER;
            break;
        case ANSWER:
            if (!answered(c)) return;
            break;
        case BODY:
            if (!read_body(c)) return;
            complete(c);
            if (!keep || c->phase == PARKED) return; /* the new connection has events of its own */
            break;
        case PARKED: return;
        case RESTING:
            if (mode == HOLD && recv(c->fd, bulk, 1, MSG_PEEK) == 0) failed(c, "closed while held");
            return;
        case FLOODING: {
            ssize_t sent = send(c->fd, bulk, sizeof bulk, MSG_NOSIGNAL);
            if (sent < 0) {
                if (errno != EAGAIN) failed(c, "flood");
                return;
            }
            bytes += (unsigned long long)sent;
            break;
        }
        }
}

static int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double quantile(double part) { return sample_count ? samples[(size_t)(part * (double)(sample_count - 1))] : 0; }

static struct sockaddr_in address(char *text) {
    struct sockaddr_in made = {.sin_family = AF_INET};
    char *colon = strrchr(text, ':');
    if (!colon) die("an address is written ip:port");
    *colon = 0;
    made.sin_port = htons((unsigned short)atoi(colon + 1));
    if (inet_pton(AF_INET, text, &made.sin_addr) != 1) die("not an IPv4 address");
    return made;
}

int main(int argc, char **argv) {
    int option;
    bool proxy = false;
    double limit_s = 60;
    while ((option = getopt(argc, argv, "m:x:a:o:p:c:n:d:kwts")) != -1) switch (option) {
        case 'm':
            mode = !strcmp(optarg, "hold") ? HOLD : !strcmp(optarg, "deaf") ? DEAF : !strcmp(optarg, "flood") ? FLOOD : EXCHANGE;
            break;
        case 'x': proxy = true; /* fall through */
        case 'a':
            if (door_count == MOST_DOORS) die("too many doors");
            doors[door_count++] = address(optarg);
            break;
        case 'o': origin = optarg; break;
        case 'p': path = optarg; break;
        case 'c': clients = atoi(optarg); break;
        case 'n': most_ops = strtoull(optarg, NULL, 10); break;
        case 'd': limit_s = atof(optarg); break;
        case 'k': keep = true; break;
        case 'w': warming = true; break;
        case 't': tunnel = true; break;
        case 's': secure = true; break;
        default: return 2;
        }
    if (!door_count) die("no -x and no -a");
    tunnel = tunnel && proxy;
    snprintf(host, sizeof host, "%.*s", (int)strcspn(origin, ":"), origin);
    snprintf(ask_tunnel, sizeof ask_tunnel, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", origin, origin);
    const char *prefix = proxy && !tunnel ? "http://" : "";
    snprintf(ask, sizeof ask, "GET %s%s%s HTTP/1.1\r\nHost: %s\r\nUser-Agent: load/1\r\nAccept: */*\r\n\r\n", prefix,
             *prefix ? origin : "", path, secure ? host : origin);
    if (secure) {
        context = SSL_CTX_new(TLS_client_method());
        if (!context) die("TLS context");
        SSL_CTX_set_verify(context, SSL_VERIFY_NONE, NULL); /* the proxies' work is measured, not this client's */
        SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
    }
    struct rlimit files = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    all = calloc((size_t)clients, sizeof *all);
    if (!all || epoll_fd < 0) die("set-up");
    double began = seconds(), rested = 0;
    deadline = began + limit_s;
    for (int i = 0; i < clients; i++) all[i].to = doors[(size_t)i % door_count];
    while (dialled < clients && (!warming || dialled < WARMING)) dial(&all[dialled++]);
    struct epoll_event ready[256];
    while (live > 0 && seconds() < deadline + 30) {
        int count = epoll_wait(epoll_fd, ready, 256, 100);
        for (int i = 0; i < count; i++) advance(ready[i].data.ptr);
        if (warming && parked == clients) {
            warming = false;
            printf("READY %d\n", parked);
            fflush(stdout);
            if (getchar() == EOF) return 1;
            began = seconds();
            deadline = began + limit_s;
            started = bytes = 0;
            for (int i = 0; i < clients; i++) {
                all[i].began = began;
                started++;
                say(&all[i], ASK, ask);
                advance(&all[i]);
            }
        }
        if (mode == EXCHANGE) continue;
        if (!rested && resting == live && resting > 0) {
            printf("READY %d\n", resting);
            fflush(stdout);
            rested = seconds();
        }
        if (rested && seconds() > rested + limit_s) break;
    }
    double took = seconds() - began;
    if (mode == EXCHANGE) errors += (unsigned long long)live;
    qsort(samples, sample_count, sizeof *samples, by_size);
    printf("{\"ops\":%llu,\"errors\":%llu,\"seconds\":%.4f,\"bytes\":%llu,\"p50_us\":%.1f,\"p99_us\":%.1f,\"max_us\":%.1f,"
           "\"status\":%d,\"issuer\":\"%s\"}\n",
           ops, errors, took, bytes, quantile(.5), quantile(.99), quantile(1), last_status, issuer);
    return 0;
}
