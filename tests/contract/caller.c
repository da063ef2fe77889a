// A module that calls commands of other modules, as any module may. Built and used by `module_calls.rs`.
//
//   CALLER.CALL flags command [arg ...]          calls at once, and answers what was answered
//   CALLER.LATER flags command [arg ...]         calls from a timer, where there is no client
//   CALLER.ON event flags command [arg ...]      calls once, from within the next keyspace event of that name
//   CALLER.OUTCOME                               what the last call of the other ways was answered, in RESP; nil until then
//
// Flags are those of the server's Call function; "" is none. `PROMISE` is answered for a call that waits; its outcome comes later.

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Ctx Ctx;
typedef struct String String;
typedef struct CallReply CallReply;
typedef int (*Command)(Ctx *, String **, int);
typedef void (*TimerCallback)(Ctx *, void *);
typedef int (*EventCallback)(Ctx *, int type, const char *event, String *key);
typedef void (*PromiseCallback)(Ctx *, CallReply *, void *);

#define SERVER_FUNCTIONS(F)                                                                                            \
    F(void, SetModuleAttribs, (Ctx *, const char *, int, int))                                                         \
    F(int, CreateCommand, (Ctx *, const char *, Command, const char *, int, int, int))                                 \
    F(const char *, StringPtrLen, (const String *, size_t *))                                                          \
    F(void, RetainString, (Ctx *, String *))                                                                           \
    F(void, FreeString, (Ctx *, String *))                                                                             \
    F(CallReply *, Call, (Ctx *, const char *, const char *, ...))                                                     \
    F(int, CallReplyType, (CallReply *))                                                                               \
    F(const char *, CallReplyProto, (CallReply *, size_t *))                                                           \
    F(void, CallReplyPromiseSetUnblockHandler, (CallReply *, PromiseCallback, void *))                                 \
    F(void, FreeCallReply, (CallReply *))                                                                              \
    F(int, ReplyWithCallReply, (Ctx *, CallReply *))                                                                   \
    F(int, ReplyWithError, (Ctx *, const char *))                                                                      \
    F(int, ReplyWithSimpleString, (Ctx *, const char *))                                                               \
    F(int, ReplyWithStringBuffer, (Ctx *, const char *, size_t))                                                       \
    F(int, ReplyWithNull, (Ctx *))                                                                                     \
    F(unsigned long long, CreateTimer, (Ctx *, long long, TimerCallback, void *))                                      \
    F(int, SubscribeToKeyspaceEvents, (Ctx *, int, EventCallback))

#define DECLARE(result, name, arguments) static result(*name) arguments;
SERVER_FUNCTIONS(DECLARE)

enum { OK = 0, ERR = 1, REPLY_PROMISE = 12, NOTIFY_GENERIC = 1 << 2, NOTIFY_EXPIRED = 1 << 8, NOTIFY_MODULE = 1 << 13 };

static char outcome[512];

static void keep_outcome(CallReply *reply) {
    size_t length = 0;
    const char *proto = CallReplyProto(reply, &length);
    snprintf(outcome, sizeof outcome, "%.*s", (int)length, proto);
}

static void on_unblocked(Ctx *ctx, CallReply *reply, void *data) {
    (void)ctx, (void)data;
    keep_outcome(reply);
    FreeCallReply(reply);
}

// None if the server refused to call; `errno` tells why. The arguments begin with the flags.
static CallReply *call(Ctx *ctx, String **argv, int argc) {
    char format[32];
    snprintf(format, sizeof format, "%sv", StringPtrLen(argv[0], NULL));
    errno = 0;
    CallReply *reply = Call(ctx, StringPtrLen(argv[1], NULL), format, argv + 2, (size_t)argc - 2);
    if (reply && CallReplyType(reply) == REPLY_PROMISE) CallReplyPromiseSetUnblockHandler(reply, on_unblocked, NULL);
    return reply;
}

static int call_now(Ctx *ctx, String **argv, int argc) {
    if (argc < 3) return ReplyWithError(ctx, "ERR flags and a command, please");
    CallReply *reply = call(ctx, argv + 1, argc - 1);
    if (!reply) {
        char text[64];
        snprintf(text, sizeof text, "ERRNO %d", errno);
        return ReplyWithError(ctx, text);
    }
    if (CallReplyType(reply) == REPLY_PROMISE) {
        FreeCallReply(reply);
        return ReplyWithSimpleString(ctx, "PROMISE");
    }
    ReplyWithCallReply(ctx, reply);
    FreeCallReply(reply);
    return OK;
}

typedef struct {
    int argc;
    String *argv[16];
} Planned;

static Planned *plan(Ctx *ctx, String **argv, int argc) {
    Planned *planned = calloc(1, sizeof *planned);
    for (; planned->argc < argc && planned->argc < 16; planned->argc++) {
        RetainString(ctx, argv[planned->argc]);
        planned->argv[planned->argc] = argv[planned->argc];
    }
    outcome[0] = 0;
    return planned;
}

static void perform(Ctx *ctx, Planned *planned, int skip) {
    CallReply *reply = call(ctx, planned->argv + skip, planned->argc - skip);
    if (!reply) {
        snprintf(outcome, sizeof outcome, "ERRNO %d", errno);
    } else {
        if (CallReplyType(reply) != REPLY_PROMISE) keep_outcome(reply);
        FreeCallReply(reply);
    }
    for (int at = 0; at < planned->argc; at++) FreeString(ctx, planned->argv[at]);
    free(planned);
}

static void on_timer(Ctx *ctx, void *planned) { perform(ctx, planned, 0); }

static int call_later(Ctx *ctx, String **argv, int argc) {
    if (argc < 3) return ReplyWithError(ctx, "ERR flags and a command, please");
    CreateTimer(ctx, 1, on_timer, plan(ctx, argv + 1, argc - 1));
    return ReplyWithSimpleString(ctx, "OK");
}

static Planned *on_next_event;

static int on_event(Ctx *ctx, int type, const char *event, String *key) {
    (void)type, (void)key;
    if (!on_next_event || strcmp(event, StringPtrLen(on_next_event->argv[0], NULL))) return OK;
    // Taken first: what is called may cause the next event.
    Planned *planned = on_next_event;
    on_next_event = NULL;
    perform(ctx, planned, 1);
    return OK;
}

static int call_on(Ctx *ctx, String **argv, int argc) {
    if (argc < 4) return ReplyWithError(ctx, "ERR an event, flags and a command, please");
    on_next_event = plan(ctx, argv + 1, argc - 1);
    return ReplyWithSimpleString(ctx, "OK");
}

static int answer_outcome(Ctx *ctx, String **argv, int argc) {
    (void)argv, (void)argc;
    return outcome[0] ? ReplyWithStringBuffer(ctx, outcome, strlen(outcome)) : ReplyWithNull(ctx);
}

int ValkeyModule_OnLoad(Ctx *ctx, String **argv, int argc) {
    (void)argv, (void)argc;
    // The first word of a context is the function that finds all others.
    int (*get_api)(const char *, void *) = *(int (**)(const char *, void *))ctx;
#define FIND(result, name, arguments)                                                                                  \
    if (get_api("ValkeyModule_" #name, (void *)&name) != OK) return ERR;
    SERVER_FUNCTIONS(FIND)
    SetModuleAttribs(ctx, "caller", 1, 1);
    struct {
        const char *name;
        Command run;
    } commands[] = {{"caller.call", call_now},
                    {"caller.later", call_later},
                    {"caller.on", call_on},
                    {"caller.outcome", answer_outcome}};
    for (size_t at = 0; at < sizeof commands / sizeof *commands; at++)
        if (CreateCommand(ctx, commands[at].name, commands[at].run, "write", 0, 0, 0) != OK) return ERR;
    return SubscribeToKeyspaceEvents(ctx, NOTIFY_GENERIC | NOTIFY_EXPIRED | NOTIFY_MODULE, on_event);
}
