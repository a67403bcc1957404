/* liblagom_workers.so: collectives on worker threads, an instrument for contention between communication and computation
 * on CPU cores. Not a product path: torch's gloo is faster.
 *
 * A channel is one thread with one TCP connection to each other rank. A collective on NC channels is cut into chunks
 * that go round-robin over the first NC threads; each thread moves its chunks one after another, ring-wise, and waits
 * for the wire by blocking, by yielding its core or by spinning. As CTAs of a collective hold SMs of a GPU, threads that
 * yield or spin take the core from the concurrent computation.
 *
 * All ranks start the same collectives in the same order, so the bytes on a connection need no headers. An error on one
 * connection makes every later collective fail at once. Memory is the caller's until lw_wait returns.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define API __attribute__((visibility("default")))

enum { LW_VERSION = 1, MAX_CHANNELS = 64, MAX_RANKS = 256, MAX_JOBS = 64, POLL_MS = 100 };
enum kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, NUM_KINDS };
enum wait_mode { WAIT_BLOCK, WAIT_YIELD, WAIT_SPIN, NUM_WAIT_MODES };

struct job {
    enum kind kind;
    enum wait_mode wait;
    int num_channels;
    const float *source;
    float *target;
    size_t num_elements; /* of the whole tensor */
    size_t part;         /* elements of one rank's part, rounded up */
    size_t step;         /* elements of a part in one chunk */
    int left;            /* channels that have not ended; guarded by engine.lock */
    int status;          /* first errno of a channel; guarded by engine.lock */
    bool taken;
};

struct worker {
    struct lagom_workers *engine;
    int channel;
    pthread_t thread;
    int queue[MAX_JOBS]; /* job numbers, first in first out; guarded by engine.lock */
    unsigned head, tail;
    pthread_cond_t wake;
    float *buffers[2]; /* partial sums */
    size_t capacity;   /* elements in each buffer */
};

struct lagom_workers {
    int rank, num_ranks, num_channels, num_started;
    int *sockets; /* [channel][peer] */
    pthread_mutex_t lock;
    pthread_cond_t ended;
    atomic_bool stopping;
    atomic_int broken; /* errno of the first failure; the byte streams are out of step from then on */
    struct job jobs[MAX_JOBS];
    struct worker workers[MAX_CHANNELS];
};

static int socket_to(const struct worker *w, int peer) {
    return w->engine->sockets[w->channel * w->engine->num_ranks + peer];
}

static int modulo(int a, int n) { return ((a % n) + n) % n; }

static void wait_for_wire(enum wait_mode mode, int out, bool wants_out, int in, bool wants_in) {
    if (mode == WAIT_YIELD) {
        sched_yield();
    } else if (mode == WAIT_BLOCK) {
        struct pollfd fds[2] = {{wants_out ? out : -1, POLLOUT, 0}, {wants_in ? in : -1, POLLIN, 0}};
        poll(fds, 2, POLL_MS);
    } else {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }
}

static bool is_hard(ssize_t moved) {
    return moved < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
}

/* Sends and receives at once; 0, or the errno of what broke. */
static int exchange(struct worker *w, enum wait_mode mode, int to, const float *leaving, size_t num_leaving, int from,
                    float *arriving, size_t num_arriving) {
    const char *source = (const char *)leaving;
    char *target = (char *)arriving;
    size_t to_send = num_leaving * sizeof(float), to_receive = num_arriving * sizeof(float);
    int out = socket_to(w, to), in = socket_to(w, from);
    while (to_send || to_receive) {
        bool progress = false;
        if (to_send) {
            ssize_t moved = send(out, source, to_send, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (is_hard(moved)) return errno;
            if (moved > 0) source += moved, to_send -= (size_t)moved, progress = true;
        }
        if (to_receive) {
            ssize_t moved = recv(in, target, to_receive, MSG_DONTWAIT);
            if (moved == 0) return ECONNRESET;
            if (is_hard(moved)) return errno;
            if (moved > 0) target += moved, to_receive -= (size_t)moved, progress = true;
        }
        if (!progress) {
            if (atomic_load_explicit(&w->engine->stopping, memory_order_relaxed)) return ECANCELED;
            wait_for_wire(mode, out, to_send > 0, in, to_receive > 0);
        }
    }
    return 0;
}

/* One chunk: the same range of each rank's part. */
struct chunk {
    const struct job *job;
    size_t start;
};

static size_t chunk_length(struct chunk c, int part) {
    size_t first = (size_t)part * c.job->part + c.start;
    if (c.start >= c.job->part || first >= c.job->num_elements) return 0;
    size_t rest_of_part = c.job->part - c.start, rest = c.job->num_elements - first;
    size_t most = rest_of_part < rest ? rest_of_part : rest;
    return most < c.job->step ? most : c.job->step;
}

static size_t chunk_offset(struct chunk c, int part) { return (size_t)part * c.job->part + c.start; }

static void add(float *into, const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) into[i] = a[i] + b[i];
}

static int gather_chunk(struct worker *w, struct chunk c) {
    int n = w->engine->num_ranks, rank = w->engine->rank;
    for (int s = 0; s < n - 1; s++) {
        int leaving = modulo(rank - s, n), arriving = modulo(rank - s - 1, n);
        int error = exchange(w, c.job->wait, modulo(rank + 1, n), c.job->target + chunk_offset(c, leaving),
                             chunk_length(c, leaving), modulo(rank - 1, n), c.job->target + chunk_offset(c, arriving),
                             chunk_length(c, arriving));
        if (error) return error;
    }
    return 0;
}

/* The sum of this rank's part of the chunk goes to `result`. */
static int reduce_chunk(struct worker *w, struct chunk c, float *result) {
    int n = w->engine->num_ranks, rank = w->engine->rank;
    const float *partial = c.job->source + chunk_offset(c, modulo(rank - 1, n));
    for (int s = 0; s < n - 1; s++) {
        int leaving = modulo(rank - s - 1, n), arriving = modulo(rank - s - 2, n);
        float *sum = w->buffers[s % 2];
        int error = exchange(w, c.job->wait, modulo(rank + 1, n), partial, chunk_length(c, leaving),
                             modulo(rank - 1, n), sum, chunk_length(c, arriving));
        if (error) return error;
        float *into = s == n - 2 ? result : sum;
        add(into, c.job->source + chunk_offset(c, arriving), sum, chunk_length(c, arriving));
        partial = sum;
    }
    return 0;
}

static int swap_chunk(struct worker *w, struct chunk c) {
    int n = w->engine->num_ranks, rank = w->engine->rank;
    memcpy(c.job->target + chunk_offset(c, rank), c.job->source + chunk_offset(c, rank),
           chunk_length(c, rank) * sizeof(float));
    for (int d = 1; d < n; d++) {
        int to = modulo(rank + d, n), from = modulo(rank - d, n);
        int error = exchange(w, c.job->wait, to, c.job->source + chunk_offset(c, to), chunk_length(c, to), from,
                             c.job->target + chunk_offset(c, from), chunk_length(c, from));
        if (error) return error;
    }
    return 0;
}

static int run_chunk(struct worker *w, struct chunk c) {
    const struct job *job = c.job;
    int rank = w->engine->rank, error;
    switch (job->kind) {
    case ALL_GATHER:
        memcpy(job->target + chunk_offset(c, rank), job->source + c.start, chunk_length(c, rank) * sizeof(float));
        return gather_chunk(w, c);
    case REDUCE_SCATTER:
        return reduce_chunk(w, c, job->target + c.start);
    case ALL_REDUCE:
        error = reduce_chunk(w, c, job->target + chunk_offset(c, rank));
        return error ? error : gather_chunk(w, c);
    default:
        return swap_chunk(w, c);
    }
}

static int make_room(struct worker *w, size_t num_elements) {
    if (num_elements <= w->capacity) return 0;
    for (int i = 0; i < 2; i++) {
        float *grown = realloc(w->buffers[i], num_elements * sizeof(float));
        if (!grown) return ENOMEM;
        w->buffers[i] = grown;
    }
    w->capacity = num_elements;
    return 0;
}

static int run_share(struct worker *w, const struct job *job) {
    int error = atomic_load(&w->engine->broken);
    if (!error && (job->kind == REDUCE_SCATTER || job->kind == ALL_REDUCE))
        error = make_room(w, job->step < job->part ? job->step : job->part);
    size_t stride = job->step * (size_t)job->num_channels;
    for (size_t start = job->step * (size_t)w->channel; !error && start < job->part; start += stride)
        error = run_chunk(w, (struct chunk){job, start});
    return error;
}

static void *serve(void *argument) {
    struct worker *w = argument;
    struct lagom_workers *engine = w->engine;
    pthread_mutex_lock(&engine->lock);
    for (;;) {
        while (w->head == w->tail && !atomic_load(&engine->stopping)) pthread_cond_wait(&w->wake, &engine->lock);
        if (atomic_load(&engine->stopping)) break;
        struct job *job = &engine->jobs[w->queue[w->head++ % MAX_JOBS]];
        pthread_mutex_unlock(&engine->lock);
        int error = run_share(w, job), none = 0;
        if (error) atomic_compare_exchange_strong(&engine->broken, &none, error);
        pthread_mutex_lock(&engine->lock);
        if (error && !job->status) job->status = error;
        if (--job->left == 0) pthread_cond_broadcast(&engine->ended);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

API int lw_version(void) { return LW_VERSION; }

/* Stops and frees; nobody may be in lw_wait. The sockets stay the caller's. */
API void lw_close(struct lagom_workers *engine) {
    if (!engine) return;
    pthread_mutex_lock(&engine->lock);
    atomic_store(&engine->stopping, true);
    for (int c = 0; c < engine->num_started; c++) pthread_cond_signal(&engine->workers[c].wake);
    pthread_mutex_unlock(&engine->lock);
    for (int c = 0; c < engine->num_started; c++) {
        struct worker *w = &engine->workers[c];
        pthread_join(w->thread, NULL);
        pthread_cond_destroy(&w->wake);
        free(w->buffers[0]);
        free(w->buffers[1]);
    }
    pthread_cond_destroy(&engine->ended);
    pthread_mutex_destroy(&engine->lock);
    free(engine->sockets);
    free(engine);
}

/* `sockets` holds num_channels x num_ranks connected TCP sockets, by channel, then peer; its own place is ignored.
 * NULL if an argument is out of range or the system refuses a thread. */
API struct lagom_workers *lw_open(int rank, int num_ranks, int num_channels, const int *sockets) {
    if (num_ranks < 2 || num_ranks > MAX_RANKS || rank < 0 || rank >= num_ranks || num_channels < 1 ||
        num_channels > MAX_CHANNELS || !sockets)
        return NULL;
    struct lagom_workers *engine = calloc(1, sizeof *engine);
    if (!engine) return NULL;
    size_t num_sockets = (size_t)num_channels * (size_t)num_ranks;
    engine->sockets = malloc(num_sockets * sizeof(int));
    if (!engine->sockets) {
        free(engine);
        return NULL;
    }
    memcpy(engine->sockets, sockets, num_sockets * sizeof(int));
    engine->rank = rank, engine->num_ranks = num_ranks, engine->num_channels = num_channels;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->ended, NULL);
    for (int c = 0; c < num_channels; c++) {
        struct worker *w = &engine->workers[c];
        w->engine = engine, w->channel = c;
        pthread_cond_init(&w->wake, NULL);
        if (pthread_create(&w->thread, NULL, serve, w)) {
            pthread_cond_destroy(&w->wake);
            lw_close(engine);
            return NULL;
        }
        engine->num_started++;
    }
    return engine;
}

/* Starts a collective of num_elements fp32 in the whole tensor, of which chunks of chunk_elements go round-robin over
 * num_channels; the number to give to lw_wait, or -EINVAL, -EBUSY (too many in flight). */
API int lw_start(struct lagom_workers *engine, int kind, const float *source, float *target, size_t num_elements,
                 int num_channels, size_t chunk_elements, int wait) {
    if (!engine || kind < 0 || kind >= NUM_KINDS || wait < 0 || wait >= NUM_WAIT_MODES || !source || !target ||
        !num_elements || num_channels < 1 || num_channels > engine->num_channels || !chunk_elements)
        return -EINVAL;
    size_t num_ranks = (size_t)engine->num_ranks;
    if (kind != ALL_REDUCE && num_elements % num_ranks) return -EINVAL;
    if (kind == ALL_REDUCE && source != target) return -EINVAL;
    pthread_mutex_lock(&engine->lock);
    int number = 0;
    while (number < MAX_JOBS && engine->jobs[number].taken) number++;
    if (number == MAX_JOBS) {
        pthread_mutex_unlock(&engine->lock);
        return -EBUSY;
    }
    size_t step = chunk_elements / num_ranks;
    engine->jobs[number] = (struct job){.kind = (enum kind)kind,
                                        .wait = (enum wait_mode)wait,
                                        .num_channels = num_channels,
                                        .source = source,
                                        .target = target,
                                        .num_elements = num_elements,
                                        .part = (num_elements + num_ranks - 1) / num_ranks,
                                        .step = step ? step : 1,
                                        .left = num_channels,
                                        .taken = true};
    for (int c = 0; c < num_channels; c++) {
        struct worker *w = &engine->workers[c];
        w->queue[w->tail++ % MAX_JOBS] = number;
        pthread_cond_signal(&w->wake);
    }
    pthread_mutex_unlock(&engine->lock);
    return number;
}

/* Returns when the collective has ended on this rank: 0, or the errno of what broke; -EINVAL for a foreign number. */
API int lw_wait(struct lagom_workers *engine, int number) {
    if (!engine || number < 0 || number >= MAX_JOBS) return -EINVAL;
    pthread_mutex_lock(&engine->lock);
    struct job *job = &engine->jobs[number];
    int status = -EINVAL;
    if (job->taken) {
        while (job->left) pthread_cond_wait(&engine->ended, &engine->lock);
        status = job->status;
        job->taken = false;
    }
    pthread_mutex_unlock(&engine->lock);
    return status;
}
